"""What driving a foreign engine costs, and what new weights cost it while it decodes."""
