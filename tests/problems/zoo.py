"""Tiny random models of every architecture, and where their attention sits, written down by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers as t
from torch import Tensor, nn

VOCABULARY = 40
LENGTH = 8
Options = dict[str, Any]
SMALL: Options = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
}
PLAIN: Options = {
    **SMALL,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 32,
}
GROUPED: Options = {
    **SMALL,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}  # transformers 5.17 would take one that knows no soft-cap
TOKENS: Options = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PICTURE: Options = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Animal:
    """How to build a model, and the paths of its blocks, of what computes queries, and of the output projection.

    {} is the layer; | parts the paths of different versions of the library.

    cut: whether its attention runs on the kernels.  side: of a model with two.  layer: which one is measured.
    scale: of the weights; smaller where norm upon norm makes much of the library's float32 casts.
    """

    build: Callable[[], nn.Module]
    block: str
    attention: str
    projection: str
    cut: bool = True
    side: str | None = None
    layer: int = 1
    pads: bool = True
    scale: float = 0.35
    inputs: Callable[[], dict[str, Any]] = field(default=lambda: {"input_ids": ids()})


def ids(seed: int = 0, n: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(seed))


def picture() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))}


def sound() -> dict[str, Any]:
    return {"input_features": torch.randn(1, 8, 20, generator=torch.Generator().manual_seed(0))}


ZOO: dict[str, Animal] = {
    "bert": Animal(
        lambda: t.BertModel(t.BertConfig(**PLAIN)),
        "encoder.layer.{}",
        "encoder.layer.{}.attention.self",
        "encoder.layer.{}.attention.output.dense",
    ),
    "roberta": Animal(
        lambda: t.RobertaModel(t.RobertaConfig(**PLAIN, pad_token_id=1)),
        "encoder.layer.{}",
        "encoder.layer.{}.attention.self",
        "encoder.layer.{}.attention.output.dense",
    ),
    "distilbert": Animal(
        lambda: t.DistilBertModel(
            t.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=VOCABULARY, max_position_embeddings=32)
        ),
        "transformer.layer.{}",
        "transformer.layer.{}.attention",
        "transformer.layer.{}.attention.out_lin",
    ),
    "electra": Animal(
        lambda: t.ElectraModel(t.ElectraConfig(**PLAIN, embedding_size=12)),
        "encoder.layer.{}",
        "encoder.layer.{}.attention.self",
        "encoder.layer.{}.attention.output.dense",
    ),
    "mpnet": Animal(
        lambda: t.MPNetModel(t.MPNetConfig(**PLAIN)),
        "encoder.layer.{}",
        "encoder.layer.{}.attention.attn",
        "encoder.layer.{}.attention.attn.o",
    ),
    **{
        f"modernbert {kind}": Animal(
            lambda: t.ModernBertModel(
                t.ModernBertConfig(
                    **{**SMALL, "num_hidden_layers": 3},
                    **TOKENS,
                    local_attention=4,
                    max_position_embeddings=32,
                    cls_token_id=1,
                    sep_token_id=2,
                )
            ),
            "layers.{}",
            "layers.{}.attn",
            "layers.{}.attn.Wo",
            layer=layer,
        )
        for kind, layer in (("global", 0), ("local", 1))
    },
    "deberta-v2": Animal(
        lambda: t.DebertaV2Model(
            t.DebertaV2Config(
                **PLAIN,
                **{
                    "relative_attention": True,
                    "position_buckets": 4,
                    "pos_att_type": ["p2c", "c2p"],
                    "norm_rel_ebd": "layer_norm",
                },
            )
        ),
        "encoder.layer.{}",
        "encoder.layer.{}.attention.self",
        "encoder.layer.{}.attention.output.dense",
        cut=False,
    ),
    "t5 encoder": Animal(
        lambda: t.T5Model(t.T5Config(d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=2, vocab_size=VOCABULARY)),
        "block.{}",
        "block.{}.layer.0.SelfAttention",
        "block.{}.layer.0.SelfAttention.o",
        side="encoder",
    ),
    "gpt2": Animal(
        lambda: t.GPT2Model(
            t.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_inner=24, vocab_size=VOCABULARY, n_positions=32, **TOKENS)
        ),
        "h.{}",
        "h.{}.attn",
        "h.{}.attn.c_proj",
    ),
    "gpt-neox": Animal(
        lambda: t.GPTNeoXModel(t.GPTNeoXConfig(**SMALL, max_position_embeddings=32, **TOKENS)),
        "layers.{}",
        "layers.{}.attention",
        "layers.{}.attention.dense",
    ),
    "opt": Animal(
        lambda: t.OPTModel(
            t.OPTConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                ffn_dim=24,
                vocab_size=VOCABULARY,
                max_position_embeddings=32,
                word_embed_proj_dim=16,
                **TOKENS,
            )
        ),
        "decoder.layers.{}",
        "decoder.layers.{}.self_attn",
        "decoder.layers.{}.self_attn.out_proj",
    ),
    "bloom": Animal(
        lambda: t.BloomModel(t.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, **TOKENS)),
        "h.{}",
        "h.{}.self_attention",
        "h.{}.self_attention.dense",
    ),
    "phi": Animal(
        lambda: t.PhiModel(t.PhiConfig(**{**SMALL, "hidden_size": 32}, max_position_embeddings=32, **TOKENS)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.dense",
    ),
    "falcon": Animal(
        lambda: t.FalconModel(t.FalconConfig(**SMALL, alibi=False, new_decoder_architecture=False, **TOKENS)),
        "h.{}",
        "h.{}.self_attention",
        "h.{}.self_attention.dense",
    ),
    "llama": Animal(
        lambda: t.LlamaModel(t.LlamaConfig(**GROUPED, **TOKENS)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    "mistral": Animal(
        lambda: t.MistralModel(t.MistralConfig(**GROUPED, **TOKENS, sliding_window=4)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    "qwen2": Animal(
        lambda: t.Qwen2Model(t.Qwen2Config(**GROUPED, **TOKENS)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    "qwen3": Animal(
        lambda: t.Qwen3Model(t.Qwen3Config(**GROUPED, **TOKENS)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    "olmo2": Animal(
        lambda: t.Olmo2Model(t.Olmo2Config(**GROUPED, **TOKENS)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    "mixtral": Animal(
        lambda: t.MixtralModel(t.MixtralConfig(**GROUPED, **TOKENS, num_local_experts=4, num_experts_per_tok=2)),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    "qwen2-moe": Animal(
        lambda: t.Qwen2MoeModel(
            t.Qwen2MoeConfig(
                **{k: v for k, v in GROUPED.items() if k != "head_dim"},
                **TOKENS,
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=12,
                shared_expert_intermediate_size=12,
                decoder_sparse_step=1,
            )
        ),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.o_proj",
    ),
    **{
        f"gpt-oss {kind}": Animal(
            lambda: t.GptOssModel(
                t.GptOssConfig(
                    **GROUPED,
                    **TOKENS,
                    sliding_window=4,
                    layer_types=["sliding_attention", "full_attention"],
                    num_local_experts=4,
                    num_experts_per_tok=2,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                )
            ),
            "layers.{}",
            "layers.{}.self_attn",
            "layers.{}.self_attn.o_proj",
            layer=layer,
        )
        for kind, layer in (("local", 0), ("global", 1))
    },
    **{
        f"gemma2 {kind}": Animal(
            lambda: t.Gemma2Model(
                t.Gemma2Config(
                    **GROUPED,
                    **TOKENS,
                    sliding_window=4,
                    attn_logit_softcapping=10.0,
                    query_pre_attn_scalar=6,
                    **EAGER,
                )
            ),
            "layers.{}",
            "layers.{}.self_attn",
            "layers.{}.self_attn.o_proj",
            layer=layer,
            scale=0.15,
        )
        for kind, layer in (("local", 0), ("global", 1))
    },
    **{
        f"gemma3 {kind}": Animal(
            lambda: t.Gemma3TextModel(
                t.Gemma3TextConfig(
                    **GROUPED,
                    **TOKENS,
                    sliding_window=4,
                    layer_types=["sliding_attention", "full_attention"],
                    query_pre_attn_scalar=6,
                )
            ),
            "layers.{}",
            "layers.{}.self_attn",
            "layers.{}.self_attn.o_proj",
            layer=layer,
            scale=0.15,
        )
        for kind, layer in (("local", 0), ("global", 1))
    },
    "vit": Animal(
        lambda: t.ViTModel(t.ViTConfig(**PICTURE, intermediate_size=24)),
        "layers.{}",
        "layers.{}.attention",
        "layers.{}.attention.o_proj",
        pads=False,
        inputs=picture,
    ),
    "dinov2": Animal(
        lambda: t.Dinov2Model(t.Dinov2Config(**PICTURE, mlp_ratio=2)),
        "encoder.layer.{}",
        "encoder.layer.{}.attention|encoder.layer.{}.attention.attention",
        "encoder.layer.{}.attention.o_proj|encoder.layer.{}.attention.output.dense",
        pads=False,
        inputs=picture,
    ),
    **{
        f"swin v2 {kind}": Animal(
            lambda: t.Swinv2Model(
                t.Swinv2Config(image_size=8, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=2, mlp_ratio=2.0)
            ),
            "encoder.layers.0.blocks.{}",
            "encoder.layers.0.blocks.{}.attention.self",
            "encoder.layers.0.blocks.{}.attention.output.dense",
            layer=layer,
            pads=False,
            inputs=lambda: {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))},
        )
        for kind, layer in (("plain", 0), ("shifted", 1))
    },
    "clip text": Animal(
        lambda: t.CLIPModel(clip()),
        "encoder.layers.{}",
        "encoder.layers.{}.self_attn",
        "encoder.layers.{}.self_attn.out_proj",
        side="text",
    ),
    "clip vision": Animal(
        lambda: t.CLIPModel(clip()),
        "encoder.layers.{}",
        "encoder.layers.{}.self_attn",
        "encoder.layers.{}.self_attn.out_proj",
        side="vision",
        pads=False,
        inputs=picture,
    ),
    "whisper encoder": Animal(
        lambda: t.WhisperModel(
            t.WhisperConfig(
                d_model=16,
                encoder_layers=2,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                num_mel_bins=8,
                max_source_positions=10,
                vocab_size=VOCABULARY,
                **TOKENS,
                decoder_start_token_id=1,
            )
        ),
        "layers.{}",
        "layers.{}.self_attn",
        "layers.{}.self_attn.out_proj",
        side="encoder",
        pads=False,
        inputs=sound,
    ),
}


def clip() -> t.CLIPConfig:
    shared: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return t.CLIPConfig(
        text_config={**shared, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **TOKENS},
        vision_config={**shared, "image_size": 12, "patch_size": 4},
        projection_dim=8,
    )


def randomize(model: nn.Module, seed: int = 0, scale: float = 0.35) -> Any:
    """Weights large enough that attention is neither uniform nor saturated, norms and biases away from one and zero."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=random)
        p.data.copy_(scale * noise if p.ndim > 1 else 1 + 0.2 * noise)
    return model.eval()


def at(model: nn.Module, paths: str) -> nn.Module:
    """The last of the paths that exists: a longer one behind | is the older version's."""
    names = dict(model.named_modules())
    return next(names[path] for path in reversed(paths.split("|")) if path in names)


def double_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax without the library's cast to float32, in which a float64 mask overflows and rows of padding turn into NaN."""
    return torch.softmax(x, dim)


def reference(
    model: nn.Module, inputs: dict[str, Any], start: str, end: str, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens that enter the module at path `start`, and the dense Jacobian from there to the output of the one at `end`.

    The whole model runs, with its own eager attention and its own masks; nothing of the package takes part.
    """
    entered: list[Tensor] = []
    left: list[Tensor] = []
    moved: list[Tensor] = []
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")  # the only one that knows float64

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple:
        name = "hidden_states" if "hidden_states" in kwargs else None
        hidden = kwargs[name] if name else args[0]
        entered.append(hidden.detach())
        if not moved:
            return args, kwargs
        value = moved[0].reshape(hidden.shape)
        return (args, {**kwargs, name: value}) if name else ((value, *args[1:]), kwargs)

    def leave(_: nn.Module, args: tuple, output: Any) -> None:
        left.append(output if isinstance(output, Tensor) else output[0])

    with (
        mock.patch.object(nn.functional, "softmax", double_softmax),
        at(model, start).register_forward_pre_hook(enter, with_kwargs=True),
        at(model, end).register_forward_hook(leave),
    ):
        with torch.no_grad():
            model(**inputs)
        x = entered[0].flatten(0, -2)
        keep = torch.arange(len(x)) if real is None else real

        def f(tokens: Tensor) -> Tensor:
            left.clear()
            moved[:] = [x.index_copy(0, keep, tokens)]
            model(**inputs)
            return left[0].flatten(0, -2)[keep]

        jacobian = torch.autograd.functional.jacobian(f, x[keep], vectorize=True)
    assert isinstance(jacobian, Tensor)
    return x[keep], jacobian.reshape(jacobian.shape[0] * jacobian.shape[1], -1)
