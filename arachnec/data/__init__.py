"""Clips, the manifests that list them, and the videos they are cut from."""
