"""Companions of a quantized weight (scales, packed integers), whose rules follow from the weight's rule."""
