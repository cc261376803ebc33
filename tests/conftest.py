import signal

from hypothesis import HealthCheck, settings

# A busy machine stops a thread for longer than the 200 ms that an example may take by default, and
# than the second that ten inputs may take to be made.
settings.register_profile("no-clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clocks")

# A shell starts what it puts in the background with SIGINT ignored, and processes hand that on:
# programs that tests start would not hear the ^C that tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
