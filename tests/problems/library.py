"""Every architecture of the transformers library, tiny and random: one recipe for their configurations and their inputs.

Sizes are overridden by the names that configurations give them, sub-configurations included. A model is run on its main input;
of one with two sides, a side is taken.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

VOCABULARY = 40
LENGTH = 8
IMAGE, PATCH = 12, 4
MOST = 3_000_000  # parameters: larger ones have sizes that the recipe does not know
SIZES: dict[int, str] = {
    1: "num_key_value_heads n_kv_heads num_kv_heads n_group topk_group n_groups mamba_n_groups first_k_dense_replace "
    "decoder_num_key_value_heads encoder_num_key_value_heads n_shared_experts spatial_merge_size pixel_shuffle_factor "
    "temporal_patch_size num_dense_layers",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "depth "
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads attention_heads moe_top_k moe_k num_experts_per_tok num_experts_per_token top_k_experts "
    "decoder_num_hidden_layers encoder_num_hidden_layers decoder_num_attention_heads encoder_num_attention_heads index_n_heads "
    "num_conv_pos_embedding_groups num_blocks conv_pos_groups swa_num_attention_heads linear_num_key_heads "
    "linear_num_value_heads linear_num_heads moe_topk swa_num_key_value_heads",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts sliding_window attention_window local_attention "
    "index_topk window_size state_size mamba_d_state attention_window_size num_query_tokens num_queries ssm_state_size "
    "qk_rope_head_dim patch_size mamba_n_heads mamba_num_heads n_mamba_heads kernel_size sliding_window_size",
    8: "head_dim d_kv attention_head_size qk_nope_head_dim v_head_dim kv_channels d_head linear_key_head_dim linear_head_dim "
    "linear_value_head_dim index_head_dim mamba_d_head mamba_head_dim mamba_headdim chunk_size mamba_chunk_size rotary_dim "
    "attention_chunk_size num_mel_bins swa_head_dim global_head_dim hidden_size_per_layer_input query_pre_attn_scalar "
    "block_size",
    12: "image_size img_size qk_head_dim",
    16: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim word_embed_proj_dim projection_dim n_inner hidden_dim "
    "q_lora_rank kv_lora_rank encoder_hidden_size decoder_hidden_size lru_width out_hidden_size attention_hidden_size "
    "projection_hidden_size bottleneck_size pooler_hidden_size input_embedding_size output_embedding_size entity_emb_size "
    "true_hidden_size intra_bottleneck_size",
    24: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner mlp_dim moe_intermediate_size ffn_hidden_size "
    "shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size dense_intermediate_size "
    "moe_shared_expert_intermediate_size encoder_intermediate_size decoder_intermediate_size intermediate_size_mlp "
    "moe_hidden_size feed_forward_size",
    32: "max_position_embeddings n_positions max_source_positions max_target_positions max_sequence_length n_ctx max_seq_len "
    "max_seq_length model_max_length num_position_embeddings",
    VOCABULARY: "vocab_size decoder_vocab_size encoder_vocab_size vocab_size_per_layer_input codebook_size entity_vocab_size",
}
SMALL = {key: size for size, keys in SIZES.items() for key in keys.split()}


# what the recipe leaves wrong: sizes that have to fit each other
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "rotary_dim": 4},  # heads in four parts
    "internvl": {"downsample_ratio": 1.0},  # of three patches a side
    "mamba2": {"num_heads": 4, "head_dim": 8},  # heads of the doubled width
    **{
        kind: {"depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
        for kind in ("swin", "swinv2", "donut-swin", "maskformer-swin")
    },
    "hiera": {
        "patch_size": [7, 7],
        "depths": [2, 2],
        "num_query_pool": 1,
        "num_heads": [1, 2],
        "image_size": [32, 32],
        "masked_unit_size": [2, 2],
        "patch_stride": [4, 4],
    },
}
KEYS = {"num_key_value_heads", "n_kv_heads", "num_kv_heads"}


def architectures() -> list[str]:
    """The names of all architectures, by their configurations' types."""
    return list(MODEL_MAPPING_NAMES)


def config_of(kind: str) -> PreTrainedConfig:
    """The tiny configuration of an architecture."""
    made = CONFIG_MAPPING[kind]
    return made(**{**small(made()), **EXCEPTIONS.get(kind, {})})


def small(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments that make a configuration tiny: sizes by their names, and ids within the vocabulary."""
    found: dict[str, Any] = {}
    for number, (key, value) in enumerate(config.__dict__.items()):
        if isinstance(value, PreTrainedConfig):
            found[key] = {**small(value), "model_type": value.model_type}
        elif key in KEYS and value == config.__dict__.get("num_attention_heads"):
            found[key] = 2
        elif key in SMALL and type(value) is int:
            found[key] = min(value, SMALL[key]) if SMALL[key] <= 4 else SMALL[key]
        elif key in ("image_size", "patch_size") and isinstance(value, list | tuple):
            found[key] = [SMALL[key]] * len(value)
        elif key in SMALL and value is None and key in ("head_dim", "vocab_size"):
            found[key] = SMALL[key]
        elif type(value) is int and key.endswith(("_token_id", "_token_index", "_token_idx")) and value >= VOCABULARY:
            found[key] = {"pad": 0, "bos": 1, "eos": 2}.get(key.partition("_")[0], VOCABULARY - 1 - number % 20)
    if "qk_rope_head_dim" in found and "head_dim" in found:
        found["head_dim"] = found["qk_rope_head_dim"]
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        found["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    return found


def build(kind: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of an architecture, in float64."""
    config = config_of(kind)
    made: Any = MODEL_MAPPING[type(config)]
    made = made[0] if isinstance(made, tuple | list) else made
    with torch.device("meta"):
        count = sum(p.numel() for p in made(config).parameters())
    if count > MOST:
        raise ValueError(f"expected a tiny model, got {count} parameters")
    return randomize(made(config), seed).double()


def randomize(model: nn.Module, seed: int = 0, scale: float = 0.2) -> Any:
    """Weights large enough that attention is neither uniform nor saturated, norms and biases away from one and zero."""
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=random)
        p.data.copy_(scale * noise if p.ndim > 1 else p.data + 0.1 * noise)
    return model.eval()


def number(config: Any, *names: str, default: int) -> int:
    """The first of some sizes that a configuration has."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int) and v > 0), default)


def parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """What is measured of a model, with its inputs: the model, or each of its two sides."""
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        encoder, decoder = model.get_encoder(), model.get_decoder()
        yield "encoder", encoder, inputs_of(encoder)
        if decoder is not model and decoder is not encoder:
            width = number(decoder.config, "hidden_size", "d_model", default=16)
            context = normal(1, 6, number(config, "cross_attention_hidden_size", default=width))
            yield "decoder", decoder, {**inputs_of(decoder, "input_ids"), "encoder_hidden_states": context}
    elif (sides := dict(model.named_children())).keys() >= {"text_model", "vision_model"}:
        yield "text", sides["text_model"], inputs_of(sides["text_model"], "input_ids")
        yield "vision", sides["vision_model"], inputs_of(sides["vision_model"], "pixel_values")
    else:
        yield "", model, inputs_of(model)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(model: nn.Module, main: str | None = None) -> dict[str, Any]:
    """The main input of a model: eight ordinary ids, a picture of a few patches, or a sound of a few frames."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    main = main or getattr(model, "main_input_name", "input_ids")
    more = {"use_cache": False} if "use_cache" in names else {}
    if main in ("input_ids", "decoder_input_ids"):
        ids = torch.randint(3, VOCABULARY // 2, (1, LENGTH), generator=torch.Generator().manual_seed(0))
        more |= {"bbox": torch.full((1, LENGTH, 4), 5)} if "bbox" in names else {}
        return {main: ids, **more}
    size = getattr(config, "image_size", None) or getattr(config, "img_size", None) or IMAGE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = number(config, "num_channels", "in_channels", "in_chans", default=3)
    if main == "pixel_values" and "grid_thw" in names:
        patch, temporal = number(config, "patch_size", default=PATCH), number(config, "temporal_patch_size", default=1)
        flat = normal(16, channels * temporal * patch**2)
        return {next(iter(names)): flat, "grid_thw": torch.tensor([[1, 4, 4]]), **more}
    if main == "pixel_values":
        return {main: normal(1, channels, height, width), **more}
    if main == "input_features":
        bins = number(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", default=8)
        frames = 2 * number(config, "max_source_positions", default=16)
        own = normal(1, bins, frames) if "max_source_positions" in vars(config) else normal(1, frames, bins)
        return {main: own, **more}
    if main == "input_values" and "num_mel_bins" in vars(config):
        return {main: normal(1, number(config, "max_length", default=32), config.num_mel_bins), **more}
    if main == "input_values":
        return {main: normal(1, 1600), **more}
    raise ValueError(f"expected a main input of text, picture or sound, got {main}")


class Wide(TorchFunctionMode):
    """Leaves out casts to float32, so that a float64 model is computed in float64 throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = tree_map(
            lambda a: torch.float64 if isinstance(a, torch.dtype) and a == torch.float32 else a, (args, kwargs or {})
        )
        return func(*wide[0], **wide[1])


class DoneError(Exception):
    """What is looked for has been reached."""


def dense(module: nn.Module, inputs: dict[str, Any], start: nn.Module, end: nn.Module, call: int = 0) -> Tensor:
    """The Jacobian from the tokens that enter the module `start` to the output of `end`, at some call of it, row by row.

    The whole model runs, with its own code; nothing of the package takes part.
    """
    entered: list[Tensor] = []
    left: list[Tensor] = []
    number = iter(range(call + 1))

    def enter(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if next(number, None) != call:
            return args, kwargs
        tensors = [t for t in (kwargs.get("hidden_states"), *args, *kwargs.values()) if isinstance(t, Tensor)]
        hidden = next(t for t in tensors if t.is_floating_point() and t.ndim >= 2)
        entered.append(hidden.detach().clone().requires_grad_())

        def moved(t: Any) -> Any:
            return entered[0] if t is hidden else t

        return tuple(map(moved, args)), {key: moved(t) for key, t in kwargs.items()}

    def leave(output: Any) -> Any:
        if entered:
            left.append(next(t for t in tree_leaves(output) if isinstance(t, Tensor)))
            raise DoneError
        return output

    entering, leaving = watched(start, enter, lambda output: output), watched(end, lambda *given: given, leave)
    with entering, leaving, Wide(), torch.enable_grad(), contextlib.suppress(DoneError):
        module(**inputs)
    flat = left[0].reshape(-1)
    if not flat.requires_grad:
        return torch.zeros(len(flat), entered[0].numel(), dtype=torch.float64)
    try:
        (rows,) = torch.autograd.grad(
            flat, entered, torch.eye(len(flat), dtype=flat.dtype), retain_graph=True, is_grads_batched=True
        )
    except RuntimeError:  # some derivatives know no batches
        rows = torch.stack([torch.autograd.grad(y, entered, retain_graph=True)[0] for y in flat])
    return rows.reshape(len(flat), -1)


@contextlib.contextmanager
def watched(module: nn.Module, enter: Callable[..., Any], leave: Callable[[Any], Any]) -> Iterator[None]:
    """Inside it what enters and what leaves a module goes through two functions; hooks would miss direct calls of `forward`."""
    forward = module.forward

    def between(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = enter(args, kwargs)
        return leave(forward(*args, **kwargs))

    before = vars(module).get("forward")
    vars(module)["forward"] = between
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


def own_classes(module: nn.Module, output: str) -> tuple[type[nn.Module], ...]:
    """The classes whose outputs a model itself names `hidden_states` or `attentions`."""
    found: list[type[nn.Module]] = []
    for part in module.modules():
        known = getattr(part, "_can_record_outputs", None) or {}
        given = known.get(output, ())
        for one in given if isinstance(given, list | tuple) else [given]:
            one = getattr(one, "target_class", one)
            if isinstance(one, type):
                found.append(one)
    return tuple(dict.fromkeys(found))


def attention_in(module: nn.Module, block: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The modules of a block at which its self-attention begins and ends, by the model's own classes, or by their names."""
    if isinstance(getattr(block, "post_attention", None), nn.Module):  # of SqueezeBERT: its projection is a part of the next
        return block.attention, block.post_attention.conv1d  # pyright: ignore
    known = own_classes(module, "attentions")
    inside = [(path, m) for path, m in block.named_modules() if path]
    found = [m for _, m in inside if isinstance(m, known)]
    found = found or [m for _, m in inside if type(m).__name__.lower().endswith(("attention", "attn", "selfattention"))]
    if not found:
        return (block, block) if type(block).__name__ in PARTS else None
    start = found[0]
    deeper = [m for m in start.modules() if m is not start and type(m).__name__.lower().endswith(("attention", "attn"))]
    if deeper and not any(isinstance(m, nn.Linear | Conv1D) for m in start.children()):
        start = deeper[0]
    kind = type(start).__name__
    if kind in UNKNOWN:
        return None
    if kind in ENDS:
        begin = block if kind in STARTS else start
        return begin, begin.get_submodule(ENDS[kind])
    around = next(m for m in block.modules() if any(child is start for child in m.children()))
    output = getattr(around, "output", None) if around is not block else None
    end = getattr(output, "dense", output if isinstance(output, nn.Linear) else None)
    if not isinstance(end, nn.Module):
        return start, start
    normed = any("norm" in type(m).__name__.lower() for m in around.children())  # in front of attention: no part of it
    return (start if normed else around), end


# modules that attend, add the residual themselves and normalise: where their projection is
ENDS = {
    "AlbertAttention": "dense",
    "FunnelRelMultiheadAttention": "post_proj",
    "MobileBertSelfAttention": "attention.output.dense",
}
# attention alone, in a list of its own beside those of norms and feed-forward layers
PARTS = {"MultiHeadAttention"}
# whose projection is no module of its own
UNKNOWN = {"XLNetRelativeAttention"}
# whose queries and values are of different widths: all are made of what enters the block
STARTS = {"MobileBertSelfAttention"}

# with a picture among the words: the grid of its patches for those that are given patches, and how many tokens it becomes
PICTURED: dict[str, tuple[int, ...]] = {"llava": (), "qwen3_vl": (1, 4, 4), "internvl": ()}
TOKENS_OF_A_PICTURE = {"llava": 9, "qwen3_vl": 16, "internvl": 9}


def pictured(kind: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model that reads text and pictures, and a text with a picture in it."""
    model = build(kind)
    config: Any = model.config
    vision = config.vision_config
    words = inputs_of(model)["input_ids"][0]
    picture = torch.full((TOKENS_OF_A_PICTURE[kind],), config.image_token_id)
    found: dict[str, Any] = {"input_ids": torch.cat([words[:3], picture, words[3:]])[None], "use_cache": False}
    if PICTURED[kind]:
        grid = torch.tensor([PICTURED[kind]])
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        found["mm_token_type_ids"] = (found["input_ids"] == config.image_token_id).int()
        return model, {**found, "pixel_values": normal(int(grid.prod()), width), "image_grid_thw": grid}
    return model, {**found, "pixel_values": normal(1, 3, IMAGE, IMAGE)}
