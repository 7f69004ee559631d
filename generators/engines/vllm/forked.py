"""Imported last by the process that engine cores are forked from: sets apart what it has imported.

Their collections of garbage would look through all of it, half a second each, and copy its pages: a start makes six.
"""

from __future__ import annotations

import gc

gc.freeze()
