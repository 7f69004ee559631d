"""Surveys of chat templates."""
