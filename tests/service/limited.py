"""`dataservice` under the RLIMIT_NOFILE of $NOFILE, as soft:hard."""

import os
import resource

from dataservice.cli.main import main

if __name__ == "__main__":
    soft, hard = map(int, os.environ["NOFILE"].split(":"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    main()
