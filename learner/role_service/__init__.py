"""The processes of one role of the algorithm, which compute its model for the learner."""
