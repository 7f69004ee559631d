"""Who may call what: credentials that name role and member, and the table of the verbs each role may call."""
