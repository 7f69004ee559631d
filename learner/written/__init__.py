"""Folders that trainings and runs leave, looked at before they are called done."""
