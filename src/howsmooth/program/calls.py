"""Where a recorded run attends: torch's own calls, and attention written out as product, weights, product."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch.fx import Node

from howsmooth.program.attention import attention
from howsmooth.program.functional import FLEX
from howsmooth.program.operations import (
    ADDS,
    GATES,
    LOGITS,
    MATRIX,
    NORMALISES,
    PRODUCT,
    SHAPE,
    WEIGHTS,
    is_float,
    name,
    shape,
    walk,
)
from howsmooth.program.tracing import Flow

SDPA = "scaled_dot_product_attention"
WHOLE = {SDPA, FLEX}


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention: what its logits and its values are made of, and what it gives.

    queries, keys: the operands of the products that make the logits.  weights, products: the nodes that make weights of logits,
    and logits of queries and keys; none where the call is one operation.
    """

    queries: tuple[Node, ...]
    keys: tuple[Node, ...]
    values: tuple[Node, ...]
    output: Node
    weights: tuple[Node, ...] = ()
    products: tuple[Node, ...] = ()

    @property
    def operands(self) -> tuple[Node, ...]:
        return (*self.queries, *self.keys, *self.values)

    def __or__(self, other: "AttentionCall") -> "AttentionCall":
        """Two sets of weights that one product applies to values, as one call."""
        both = {f.name: (*getattr(self, f.name), *getattr(other, f.name)) for f in fields(self) if f.name != "output"}
        return AttentionCall(output=self.output, **{key: tuple(dict.fromkeys(nodes)) for key, nodes in both.items()})


def is_whole(n: Node) -> bool:
    """Whether a node is attention that the recorded code calls as one operation, be its operands live or frozen."""
    return n.op == "call_function" and (name(n) in WHOLE or (n.target is attention and not n.meta.get("written_out")))


def whole_call(n: Node) -> AttentionCall:
    """Attention that is one node."""
    given: Any = n.args
    q, k, v = given[:3]
    return AttentionCall((q,), (k,), (v,), n)


def find_calls(flow: Flow) -> list[AttentionCall]:
    """Every call of attention that is live, in order; but for those that only choose, as an indexer of keys does."""
    found: dict[Node, AttentionCall] = {}
    for n in flow.nodes:
        if n.op != "call_function" or not flow.live(n):
            continue
        if is_whole(n) or (n.target is attention and all(flow.live(m) for m in whole_call(n).operands)):
            found[n] = whole_call(n)
        elif name(n) in WEIGHTS:
            for call in _written_out(flow, n):
                found[call.output] = found[call.output] | call if call.output in found else call
    returned = flow.bits(flow.outputs)
    used = {n: call for n, call in found.items() if flow.down(n) & returned} or found
    return sorted(used.values(), key=lambda call: flow.index[call.output])


def lonely_operands(flow: Flow, weights: Node) -> list[Node]:
    """What weights that are made of one live tensor compare it with, as learned queries are."""
    if weights.target is attention:
        q, k = (whole_call(weights).queries[0], whole_call(weights).keys[0])
        others = [m for m in (q, k) if not flow.live(m)]
        return [m for m in others if len(others) == 1 and is_float(m) and len(shape(m) or ()) >= 3]
    if name(weights) not in WEIGHTS or not flow.live(weights) or _products_behind(flow, weights):
        return []
    if not any(_applied(flow, weights)) or not _are_weights(flow, weights):  # a gate, what experts do entry by entry, a decay
        return []
    products = _products_behind(flow, weights, live=1)
    others = [m for p in products for m in _operands(p) if not flow.live(m)]
    return [m for m in others if is_float(m) and len(shape(m) or ()) >= 3]


def _written_out(flow: Flow, weights: Node) -> Iterator[AttentionCall]:
    """The attention whose weights a node makes."""
    products = _products_behind(flow, weights)
    if not products or not _are_weights(flow, weights):
        return
    queries, keys = (tuple(dict.fromkeys(side)) for side in zip(*(_factors(flow, p) for p in products), strict=True))
    for output, values in _applied(flow, weights):
        yield AttentionCall(queries, keys, (values,), output, (weights,), tuple(products))


def _are_weights(flow: Flow, weights: Node) -> bool:
    """Whether a node makes weights of logits; exponentials do where they are normalised.

    Something is then divided by their sum, or by their product with values, or the logarithm of the sum was taken off before.
    """
    if name(weights) != "exp":
        return True
    before = walk(flow.feeds(weights), lambda n: flow.feeds(n) if _is_of_logits(flow, n) else ())
    if any(name(n) == "logsumexp" for n in before):
        return True
    behind = walk([weights], lambda n: [u for u in flow.users(n) if _is_of_logits(flow, u) or len(_factors(flow, u)) == 2])
    divides = ("div", "true_divide", "reciprocal")
    return any(name(u) in divides and n in u.args[-1:] for n in behind for u in n.users)


def _factors(flow: Flow, n: Node) -> list[Node]:
    """Live operands of a product, two of them; fewer where a node is none."""
    return [m for m in _operands(n) if flow.live(m)]


def _operands(n: Node) -> list[Node]:
    """Operands of a product, or of a sum or the like of each with each; none where a node is none of these."""
    if name(n) in ADDS | GATES:
        terms = [m for m in n.args[:2] if isinstance(m, Node)]
        each = len(terms) == 2 and all(shape(m) != shape(n) and len(shape(m) or ()) >= 3 for m in terms)
        return terms if each and _unshaped(terms[0]) is not _unshaped(terms[1]) else []
    if name(n) not in PRODUCT:
        return []
    given = n.args[1] if name(n) == "einsum" else n.args[1:3] if name(n) in ("baddbmm", "addbmm", "addmm") else n.args[:2]
    assert isinstance(given, list | tuple)
    return [m for m in given if isinstance(m, Node)]


def _unshaped(n: Node) -> Node:
    """What a node is but another shape of."""
    while name(n) in SHAPE and isinstance(n.args[0], Node):
        n = n.args[0]
    return n


def _is_of_logits(flow: Flow, n: Node) -> bool:
    """Whether a node makes logits of logits: entry by entry, or head by head, or of the entries that each with each has."""
    feeds = flow.feeds(n)
    by_head = name(n) == "batch_norm" and len(shape(n) or ()) == 4
    alone = len(feeds) == 1 and shape(feeds[0]) == shape(n) and (name(n) not in MATRIX | NORMALISES or by_head)
    return alone or name(n) in LOGITS or (name(n) in MATRIX and (_mixes_heads(flow, n) or _of_each_with_each(flow, n)))


def _of_each_with_each(flow: Flow, n: Node) -> bool:
    """Whether a matrix makes logits of the entries of sums of each with each, as additive attention does."""
    m = flow.only(n)
    while m is not None and (before := flow.only(m)) is not None and name(m) not in MATRIX and not _factors(flow, m):
        m = before
    return m is not None and name(m) in ADDS and len(_factors(flow, m)) == 2


def _products_behind(flow: Flow, weights: Node, live: int = 2) -> list[Node]:
    """The products that the logits are made of, of two live tensors or of that many."""
    if len(shape(weights) or ()) < 2:
        return []

    def before(n: Node) -> list[Node]:
        return flow.feeds(n) if len(_factors(flow, n)) != live and _is_of_logits(flow, n) else []

    found = [n for n in walk(flow.feeds(weights), before) if len(_factors(flow, n)) == live and len(shape(n) or ()) >= 2]
    return sorted(found, key=flow.index.__getitem__)


def _mixes_heads(flow: Flow, n: Node) -> bool:
    """Whether a matrix is small beside what it is applied to, as one that mixes heads is."""
    live = flow.feeds(n)
    others = [m for m in n.all_input_nodes if m not in live and is_float(m)]
    if len(live) != 1 or not others:
        return False
    size, matrix = shape(live[0]) or (), shape(others[0]) or ()
    if not matrix or len(size) < 3:
        return False
    return max(matrix) <= max(size[:-2]) or (len(size) >= 4 and matrix[-1] == size[-1])


def _applied(flow: Flow, weights: Node) -> Iterator[tuple[Node, Node]]:
    """The products of the weights with something live that is not made of them, and that something."""
    own = flow.down(weights)

    def others(u: Node) -> list[Node]:
        factors = _factors(flow, u)
        return [m for m in factors if not own & flow.bit(m)] if len(factors) == 2 else []

    def behind(n: Node) -> list[Node]:
        return [] if others(n) else [u for u in flow.users(n) if others(u) or _is_of_logits(flow, u)]

    return ((n, others(n)[0]) for n in walk([weights], behind) if others(n))
