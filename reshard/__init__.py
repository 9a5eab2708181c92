"""Split, merge and re-split checkpoints of large language models for tensor parallelism, and prove the result."""

from formats.errors import ReshardError
from reshard.api import Access, Padding, Summary, load, merge, plan, split

__all__ = ["Access", "Padding", "ReshardError", "Summary", "load", "merge", "plan", "split"]
__version__ = "0.1.0"
