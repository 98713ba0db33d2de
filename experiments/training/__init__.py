"""Training of drafters: text of the target's own, its features, losses and the loop."""
