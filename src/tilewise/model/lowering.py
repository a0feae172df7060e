"""Operations of a graph that kernels of ours run, put in the place of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..core.activations import is_activation
from .chains import Chain, Chains
from .native import Native, Original
from .operations import asked, row_of
from .shuffles import shuffles


def lower(capture: Any) -> None:
    """Chains of elementwise operations, and all other operations that a row knows."""
    chains = Chains(capture.graph, capture.module_of, capture._norm_of)
    shuffled = shuffles(capture.graph, chains.effects) if capture.is_channels_last else {}
    fused = {chain.last: chain.operands[0] for chain in chains.found.values()
             if _activates(capture, chains, chain)}
    waiting = set(fused.values())
    put: dict[fx.Node, fx.Node] = {}  # what took whose place
    for node in list(capture.graph.nodes):
        chain = chains.found.get(node)
        if node in waiting:
            continue
        if node in fused and chain is not None:
            before = fused[node]
            module = capture.module_of(before)
            operation = asked(before, module, chain.steps[0][1])
            assert operation is not None
            put[node] = _put(capture, operation.name, operation.run, [before, node],
                             operation.operands, operation.parts, operation.learn)
        elif chain is not None:
            operands = [put.get(operand, operand) for operand in chain.operands]
            put[node] = _put(capture, chain.name, chain.run(), chain.nodes, operands, chain.norms,
                             chain.learn())
        elif node in shuffled:
            found = shuffled[node]
            put[node] = _put(capture, "channel shuffle", *found.settled(), found.operands)
        else:
            operation = asked(node, capture.module_of(node))
            if operation is not None and (capture.is_channels_last or not operation.turns):
                put[node] = _put(capture, operation.name, operation.run, [node],
                                 operation.operands, operation.parts, operation.learn)


def _activates(capture: Any, chains: Chains, chain: Chain) -> bool:
    """Whether a chain is an activation that the operation before it can do."""
    if len(chain.steps) != 1 or not is_activation(chain.steps[0][1]) or len(chain.operands) != 1:
        return False
    (before,) = chain.operands
    module = capture.module_of(before)
    row = row_of(before, module)
    if row is None or not row.activates or len(before.users) != 1:
        return False
    found = asked(before, module)
    return (found is not None and (capture.is_channels_last or not found.turns)
            and not chains.effects.is_written_between(
                before, chain.last, list(found.operands), {before, chain.last}))


def _put(capture: Any, name: str, run: Any, nodes: list[fx.Node], operands: Sequence[fx.Node],
         parts: Sequence[Any] = (), learn: Any = None) -> fx.Node:
    """A step in the place of the last of some nodes, whose other results nobody else reads."""
    others = {source: None for node in nodes for source in node.all_input_nodes
              if source not in nodes and source not in operands}
    given = (*operands, *others)
    original = Original(nodes, given, capture.module_of)
    for module in (*map(capture.module_of, nodes), *parts):
        capture.guard(module)
    last, graph = nodes[-1], capture.graph
    with graph.inserting_after(last):
        step = Native(name, run, len(operands), original, parts, learn)
        new: fx.Node = graph.call_module(capture.add(step), given)
    last.replace_all_uses_with(new)
    for node in reversed(nodes):
        graph.erase_node(node)
    return new
