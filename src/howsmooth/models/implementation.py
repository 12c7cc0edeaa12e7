"""The kernels as an attention implementation of the transformers library, for whoever wants derivatives at long context.

register()
model = AutoModel.from_pretrained(name, attn_implementation="howsmooth")
torch.func.jvp(lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state, (x,), (v,))
"""

from collections import OrderedDict

from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, attention
from howsmooth.models import intercept
from howsmooth.models.intercept import Call, Intercept

_REMEMBERED = 64  # masks handed out and not forgotten; a forward pass makes a few


class _Recent(OrderedDict[int, tuple[Tensor, Mask]]):
    """Remembers the last few entries."""

    def __setitem__(self, key: int, value: tuple[Tensor, Mask]) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > _REMEMBERED:
            self.popitem(last=False)


def _attend(call: Call) -> Tensor:
    return attention(call.q, call.k, call.v, call.scores)


def _refuse(reason: str) -> BadInputError:
    return BadInputError(
        f"expected attention over whole sequences with a fixed mask, got {reason}; "
        "call model.eval() and pass use_cache=False, or take attn_implementation='eager'"
    )


def register() -> None:
    """Make `attn_implementation="howsmooth"` known to transformers.

    Every model of the library that asks for it by name runs on the kernels, forwards, backwards and in forward mode, in
    O(n · d) memory. For whole sequences in eval mode; a cache or dropout is refused.

    >>> register()
    >>> import torch
    >>> from transformers import GPT2Config, GPT2Model
    >>> config = GPT2Config(
    ...     n_layer=1,
    ...     n_embd=8,
    ...     n_head=2,
    ...     vocab_size=5,
    ...     n_positions=4,
    ...     attn_implementation="howsmooth",
    ...     bos_token_id=0,
    ...     eos_token_id=0,
    ... )
    >>> model = GPT2Model(config).eval()
    >>> x = torch.randn(1, 4, 8)
    >>> torch.func.jvp(lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state, (x,), (x,))[1].shape
    torch.Size([1, 4, 8])
    """
    intercept.announce()
    intercept.stand_in(Intercept(on_call=_attend, masks=_Recent(), refuse=_refuse))
