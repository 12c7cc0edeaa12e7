"""The table of operations: its names are torch's, walks visit each node once, and nodes say what they are."""

import torch
from torch import nn
from torch.fx import Graph

from howsmooth.program import operations, record
from howsmooth.program.operations import dependents, is_random, name, walk

OWN = {"rewritten", "copied", "getitem", "grouped_mm_fallback"}  # of this package, of Python, of transformers
TABLE = {key: names for key, names in vars(operations).items() if key[0].isupper() and isinstance(names, set)}


def test_every_name_is_one_of_torch():
    strange = {key: sorted(n for n in names - OWN if not hasattr(torch.ops.aten, n)) for key, names in TABLE.items()}
    assert {key: names for key, names in strange.items() if names} == {}


def test_the_check_knows_what_is_none():
    assert not hasattr(torch.ops.aten, "softmacks")


def diamond() -> Graph:
    graph = Graph()
    a = graph.placeholder("a")
    b, c = graph.call_function(torch.neg, (a,)), graph.call_function(torch.exp, (a,))
    graph.output(graph.call_function(torch.add, (b, c)))
    return graph


def test_a_walk_visits_each_node_once_and_goes_no_further_than_it_is_told():
    nodes = list(diamond().nodes)
    assert sorted(n.name for n in walk(nodes[-1:], lambda n: n.all_input_nodes)) == ["a", "add", "exp", "neg", "output"]
    stops = walk(nodes[-1:], lambda n: () if n.name == "add" else n.all_input_nodes)
    assert [n.name for n in stops] == ["output", "add"]
    assert {n.name for n in dependents(nodes, nodes[1:2])} == {"neg", "add", "output"}


def test_dropout_that_drops_nothing_is_not_random():
    class Drops(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, training=False) + nn.functional.dropout(x, 0.0, training=True)

    program = record(Drops(), (torch.ones(2, 3),))
    found = [n for n in program.nodes if name(n) == "dropout"]
    assert found
    assert not any(map(is_random, found))
