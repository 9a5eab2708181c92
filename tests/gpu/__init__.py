"""What needs a GPU, by ``make test-gpu``: all other tests see none, so that they find the same on each machine."""
