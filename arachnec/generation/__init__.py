"""Requests to videos: the plan of a sampler file's requests, the ranks that run it, and the files it writes."""
