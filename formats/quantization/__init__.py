"""What belongs to a quantized weight, as functions of the rule of the weight."""
