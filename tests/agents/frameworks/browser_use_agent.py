"""browser-use: one agent, which gets the second question as a further task, with a browser that the machine has."""

import asyncio
import os
import sys

from browser_use import Agent, Browser, ChatOpenAI


async def main():
    browser = Browser(
        executable_path=os.environ["BROWSER"],
        headless=True,
        chromium_sandbox=False,
        keep_alive=True,
        enable_default_extensions=False,
    )
    agent = Agent(sys.argv[1], llm=ChatOpenAI(model="gpt-4.1"), browser=browser, use_vision=False, use_judge=False)
    print((await agent.run()).final_result())
    agent.add_new_task(sys.argv[2])
    print((await agent.run()).final_result())
    await browser.kill()


asyncio.run(main())
