"""Groups in progress: admission, requests to the engine, drafts, submission to the buffer."""
