"""Placement of target and drafter on device meshes."""
