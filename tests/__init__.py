"""The tests of offdrift; `--jaxtyping-packages` names `tests.shapes` by its path, and imports no further than this."""

from tests import shapes as shapes
