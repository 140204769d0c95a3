"""The marks that tell one table of datasets from another."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an extra brings datasets
    from datasets import Dataset


def rows_fingerprint(rows: "Dataset") -> str:
    """Return the hash of a table's files and of all that was done with them (datasets 5.2, `_fingerprint`).

    Cached results have it in their names. `Dataset.map` takes one as `new_fingerprint`, which is documented, but nothing
    documented returns it.
    """
    return rows._fingerprint
