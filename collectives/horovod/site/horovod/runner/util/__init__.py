"""Helpers of ``horovodrun`` that programs and tests import."""
