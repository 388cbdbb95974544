"""How much one request may carry."""

MAX_BODY_BYTES = 2**20
MAX_UPLOAD_BYTES = 2**22  # of records or an artifact
MAX_BATCH = 1000
MAX_PAGE = 1000
MAX_FAULTS = 100  # that an answer names; an object of a request has no more members
