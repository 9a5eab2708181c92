"""Tests that a format, a container, a store or a quantization of another package is to pass, by inheriting them.

A package adds one of these by an entry point, of which the name is that of the format's package, the container, the
URL's scheme or the ``quant_method``::

    [project.entry-points."reshard.formats"]        # a package whose folder has format files
    acme = "acme_formats"
    [project.entry-points."reshard.containers"]     # a reshard.formats.files.containers.Container
    acme = "acme:CONTAINER"
    [project.entry-points."reshard.stores"]         # takes a URL, returns {name: a Remote, a path or bytes}
    acme = "acme:files_of"
    [project.entry-points."reshard.quantizations"]  # takes the settings in config.json, returns a Scheme
    acme = "acme:scheme_of"

``pytest`` is needed, reshard's own tests are not.
"""

from reshard.testing.contracts import ContainerTests, FormatTests, QuantizationTests, StoreTests
from reshard.tiny_model import write_model

__all__ = ["ContainerTests", "FormatTests", "QuantizationTests", "StoreTests", "write_model"]
