"""What the tests of profile take from those of verify."""

from tests.verify.conftest import gpus as gpus
from tests.verify.conftest import one_rank as one_rank
