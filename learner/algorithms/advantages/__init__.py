"""Advantage estimators: from the rewards of a whole batch to the advantages of its tokens; importing enters them."""
