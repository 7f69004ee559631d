"""`rollmesh weights verify`: whether every generator serves what the learner has published."""
