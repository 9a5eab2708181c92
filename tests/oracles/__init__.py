"""What real programs hold, element for element: recorded fixtures, each with its own README."""
