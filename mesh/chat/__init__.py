"""Chat templates: how they are rendered, and what they do with a conversation, found out by asking them."""
