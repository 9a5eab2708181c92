"""Places of a model's elements in the files of a format."""
