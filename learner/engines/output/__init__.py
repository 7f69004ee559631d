"""From hidden states to log-probs: the output layer, its logits, and their softmax in pieces."""
