"""Signals that lie channels-last from one convolution of ours to the next.

Nobody else sees how they lie: between are only operations that take any layout. So a program's
signals are turned where they come in, and once more where they leave.
"""

from __future__ import annotations

from torch import fx

from .effects import is_random, name_of
from .layout import SIGNAL, Inside, enter

VIEWS = {"chunk", "split", "getitem", "narrow", "exactly"}  # the same values, however they lie


def turn_signals(inside: Inside) -> None:
    """Tell convolutions of one axis to leave their results as they are, where that is unseen."""
    lying: set[fx.Node] = set()  # results of such convolutions
    ours: set[fx.Node] = set()  # what comes of them; torch.cat and some others turn it back
    unseen = _unseen(inside)
    for node in list(inside.graph.nodes):
        if not inside.is_block(node):
            if _takes_any(inside, node) and any(arg in ours for arg in node.all_input_nodes):
                ours.add(node)
        elif _is_of_signals(inside, node):
            stays = node in unseen
            if node.args[0] not in lying and (stays or node.args[0] in ours):
                _enter(inside.graph, node)
            if stays:
                node.kwargs = {**node.kwargs, "inside": True}
                lying.add(node)
                ours.add(node)


def _unseen(inside: Inside) -> set[fx.Node]:
    """Values of which nothing but blocks and operations that take any layout are made."""
    unseen: set[fx.Node] = set()
    for node in reversed(inside.graph.nodes):
        if all(_is_of_signals(inside, user) or (_takes_any(inside, user) and user in unseen)
               for user in node.users):
            unseen.add(node)
    return unseen


def _takes_any(inside: Inside, node: fx.Node) -> bool:
    """Whether an operation gives the same values however its operands lie."""
    return not is_random(node, inside.module_of(node)) and (
        inside.keeps(node) or name_of(node) in VIEWS)


def _is_of_signals(inside: Inside, node: fx.Node) -> bool:
    """Whether it is a convolution of ours of one axis: those of others keep the layout."""
    return inside.is_block(node) and inside.module_of(node).axes == 1


def _enter(graph: fx.Graph, block: fx.Node) -> None:
    """What a convolution reads is turned, if it does not lie so."""
    with graph.inserting_before(block):
        turned = graph.call_function(enter, (block.args[0], (SIGNAL,)))
    block.args = (turned, *block.args[1:])
