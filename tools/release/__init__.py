"""Releases for boards: keys, signed manifests, announcements."""
