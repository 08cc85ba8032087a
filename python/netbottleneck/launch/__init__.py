"""Rank discovery and rendezvous under each launcher."""
