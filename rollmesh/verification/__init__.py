"""`rollmesh weights verify`: checks that every generator serves the learner's published weights."""
