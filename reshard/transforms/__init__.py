"""Sources as other checkpoints: with a delta or an adapter on them, dequantized, quantized, averaged or cast."""
