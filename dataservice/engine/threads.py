"""The threads that the engine's blocking calls have.

await in_store(store.jobs)          the state store, whose calls take turns
await in_opening(open_job, ...)     jobs, each in a process that is bounded
await in_counting(drawn, ...)       how much of each source is drawn, for whoever looks
FairThreads                         planning, and fetching what it needs: see fair_threads.py
"""

from dataservice.core.threads import CallThreads

in_store = CallThreads("the state store", 4, for_all=True)
in_opening = CallThreads("opening", 2)
in_counting = CallThreads("counting", 1)
