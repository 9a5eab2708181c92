"""Imported by the fork server of verify/forward/launch.py: what transformers makes once in a process, as it loads its
first model, is made once for all ranks.
"""

from formats.transformers_internals import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
