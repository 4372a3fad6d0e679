"""Adapters for Diffusers' video transformers: real configurations as data, and their training objectives."""
