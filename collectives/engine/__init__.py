"""Requests on their way: validated, agreed on by all ranks, fused, carried out, fetched."""
