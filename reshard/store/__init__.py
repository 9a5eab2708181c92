"""Stores of byte ranges: a folder, the Hub, a bucket, a URL."""
