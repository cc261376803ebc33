"""A web server of files that answers each request after a while: `python -m
benchmarks.data.far_store FOLDER DELAY_S` prints its port.

It serves byte ranges, as object stores do, to any number of requests at once.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web


def app(folder: Path, delay_s: float) -> web.Application:
    """Serves the files of a folder."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def answer(request: web.Request) -> web.Response:
        data = files.get(request.match_info["name"])
        if data is None:
            raise web.HTTPNotFound
        headers = {"Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(data))})
        await asyncio.sleep(delay_s)
        wanted = request.http_range
        if wanted.start is None:
            return web.Response(body=data, headers=headers)
        start, end = wanted.start, min(wanted.stop or len(data), len(data))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return web.Response(status=206, body=data[start:end], headers=headers)

    made = web.Application()
    made.router.add_get("/{name}", answer)
    return made


async def serve(folder: Path, delay_s: float) -> None:
    """Until the process is ended."""
    runner = web.AppRunner(app(folder, delay_s), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2])))
