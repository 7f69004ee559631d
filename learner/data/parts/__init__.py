"""Parts of rows in the one form that all later code takes.

Published rows write the same conversation in many ways. It is brought into this form where a row is read, and nowhere
else.
"""
