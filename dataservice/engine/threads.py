"""The threads that the engine's blocking calls have.

await in_store(store.jobs)          the state store, whose calls take turns
await in_counting(drawn, ...)       how much of each source is drawn and bad, for whoever looks
FairThreads                         planning, fetching what it needs, opening: see fair_threads.py
"""

from dataservice.core.threads import CallThreads

in_store = CallThreads("the state store", 4, for_all=True)
in_counting = CallThreads("counting", 1)
