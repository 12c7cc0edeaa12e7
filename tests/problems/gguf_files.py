"""GGUF files byte by byte, so that a header can lie: small Llamas of our own, as llama.cpp would write them."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers as t
from torch import Tensor

from problems.zoo import randomize

TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(0, 256, 8)), "▁", "a", "b", "c", "▁a")
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
NUMBERS: dict[type, tuple[int, str]] = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama(seed: int = 0, **more: Any) -> t.LlamaForCausalLM:
    return randomize(t.LlamaForCausalLM(t.LlamaConfig(**(SHAPE | {"tie_word_embeddings": True} | more))), seed)


def settings(model: t.LlamaForCausalLM) -> dict[str, Any]:
    """What llama.cpp says of such a model."""
    c = model.config
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": c.num_hidden_layers,
        "llama.context_length": c.max_position_embeddings,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_attention_heads,
        "llama.attention.head_count_kv": c.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": c.hidden_size // c.num_attention_heads,
        "llama.vocab_size": c.vocab_size,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 32, *[1] * 5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def weights(model: t.LlamaForCausalLM) -> dict[str, Tensor]:
    """Its weights by llama.cpp's names, with the two halves of each rotary head interleaved."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        *block, rest = name.removeprefix("model.").removeprefix("layers.").removesuffix(".weight").split(".", 1)
        block, rest = (block, rest) if block and block[0].isdigit() else ([], ".".join([*block, rest]))
        value = parameter.detach()
        if rest.endswith(("q_proj", "k_proj")):
            heads = SHAPE["num_attention_heads" if rest.endswith("q_proj") else "num_key_value_heads"]
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        found[".".join([*(["blk", *block] if block else []), NAMES[rest], "weight"])] = value
    return found


def packed(tensor: Tensor, kind: str) -> bytes:
    """The bytes of a weight, in rows of blocks."""
    import gguf

    return gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind]).tobytes()


def unpacked(tensor: Tensor, kind: str) -> Tensor:
    """What is left of a weight."""
    import gguf

    type_ = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(np.copy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), type_), type_)))


def text(word: str) -> bytes:
    content = word.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bytes):  # written as it is, its type first
        return struct.unpack_from("<I", value)[0], value[4:]
    if isinstance(value, str):
        return 8, text(value)
    if isinstance(value, list):
        kinds, parts = zip(*map(_value, value), strict=True)
        return 9, struct.pack("<IQ", kinds[0], len(parts)) + b"".join(parts)
    kind, form = NUMBERS[type(value)]
    return kind, struct.pack(form, value)


def written(
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    kind: str = "F32",
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    shapes: Mapping[str, tuple[int, ...]] = {},
    starts: Mapping[str, int] = {},
) -> bytes:
    """A file. kind: of all weights with two dimensions.  counts, shapes, starts: what the header says where it lies."""
    import gguf

    head, data = b"", b""
    for name, value in settings.items():
        number, content = _value(value)
        head += text(name) + struct.pack("<I", number) + content
    for name, tensor in weights.items():
        own = kind if tensor.ndim == 2 else "F32"
        shape = shapes.get(name, tuple(tensor.shape))
        number = int(gguf.GGMLQuantizationType[own])
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, starts.get(name, len(data)))
        data += packed(tensor, own)
        data += b"\0" * (-len(data) % 32)
    start = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(weights), len(settings)))) + head
    return start + b"\0" * (-len(start) % 32) + data
