"""Property tests here run on machines of any load: how long an example takes says nothing."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
