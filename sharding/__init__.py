"""Meshes, logical-axis rules and placement of target and drafter."""
