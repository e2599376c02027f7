"""Keeps what a project recorded with a checkpoint where no label can hold it.

A label of a checkpoint has at most 256 bytes; custom metadata of Orbax may be of any
length. A mount has labels of any length. An import stores each longer one as an item,
a text, named by its label: "orbax.custom_metadata" becomes "orbax-custom-metadata".
"""

from dataclasses import replace
from itertools import chain, count

from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.tree_rows import (
    MAX_NAME,
    Row,
    item_name,
    item_row,
    tree_of,
)
from storesvc_client._values.arguments import MAX_TEXT_BYTES


def with_items_for_long_labels(step: ForeignStep) -> ForeignStep:
    """Returns a step whose labels are short enough for a checkpoint.

    Raises:
        PreconditionError: No checkpoint can hold so many items.
    """
    long = {
        label: text
        for label, text in step.labels.items()
        if len(text.encode()) > MAX_TEXT_BYTES
    }
    if not long:
        return step
    rows = [
        Row(leaf=leaf, array=array, name=leaf.key)
        for leaf, array in zip(step.tree.leaves, step.arrays, strict=True)
    ]
    taken = {row.leaf.key for row in rows}
    for label, text in long.items():
        name = item_name(label)
        # An item of that name comes from an earlier import, which was exported.
        more = (f"{name[: MAX_NAME - 4]}-{again}" for again in count(2))
        for item in chain([name], more):
            row = item_row(item, text, name=f"{step.url} {label}")
            if row.leaf.key not in taken:
                break
        rows.append(row)
        taken.add(row.leaf.key)
    tree, arrays = tree_of(
        rows,
        place=step.url,
        advice="import it from a copy with fewer files next to its trees",
        structure=step.tree.structure,
    )
    labels = {label: text for label, text in step.labels.items() if label not in long}
    return replace(step, tree=tree, arrays=arrays, labels=labels)
