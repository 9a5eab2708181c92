"""Pages: HTML and SVG that need no network, no script, no font."""
