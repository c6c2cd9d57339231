"""Run inside a pod: asks a URL over new connections, at full speed for some seconds, then slowly.

Arguments: URL, seconds at full speed, seconds in all. The output is a JSON object of counts by status or error.
"""

import collections
import json
import sys
import threading
import time
import urllib.error
import urllib.request

THREADS = 8


def ask(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return repr(error)


def work(url, fast_until, until, counts):
    while (now := time.monotonic()) < until:
        counts[ask(url)] += 1
        if now > fast_until:
            time.sleep(0.5)


url, fast, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
began, counted = time.monotonic(), [collections.Counter() for _ in range(THREADS)]
threads = [threading.Thread(target=work, args=(url, began + fast, began + seconds, counts)) for counts in counted]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(sum(counted, collections.Counter())))
