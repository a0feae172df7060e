"""Signals that lie channels-last from one convolution of ours to the next.

Nobody else sees how they lie: between are only operations that take any layout. So a program's
signals are turned where they come in, and once more where they leave.
"""

from __future__ import annotations

from torch import fx

from .layout import SIGNAL, Inside, enter


def turn_signals(inside: Inside) -> None:
    """Tell convolutions of one axis to leave their results as they are, where that is unseen."""
    lying: set[fx.Node] = set()  # results of such convolutions
    ours: set[fx.Node] = set()  # what comes of them; torch.cat and some others turn it back
    for node in list(inside.graph.nodes):
        if not inside.is_block(node):
            if inside.keeps(node) and any(arg in ours for arg in node.all_input_nodes):
                ours.add(node)
        elif inside.module_of(node).axes == 1:
            stays = inside.ends_in_blocks(node)
            if node.args[0] not in lying and (stays or node.args[0] in ours):
                _enter(inside.graph, node)
            if stays:
                node.kwargs = {**node.kwargs, "inside": True}
                lying.add(node)
                ours.add(node)


def _enter(graph: fx.Graph, block: fx.Node) -> None:
    """What a convolution reads is turned, if it does not lie so."""
    with graph.inserting_before(block):
        turned = graph.call_function(enter, (block.args[0], (SIGNAL,)))
    block.args = (turned, *block.args[1:])
