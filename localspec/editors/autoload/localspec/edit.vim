" Lines changed as somebody says, shown as a diff before anything is taken.

let s:request = {}
let s:form = join(readfile(expand('<sfile>:p:h:h:h') .. '/prompts/edit'), "\n")

" Ask for lines `range[0]` to `range[1]` of this buffer to be changed. The old text is the prediction:
" what stays as it is is not written anew word by word.
function! localspec#edit#ask(range, instruction) abort
  if !empty(s:request)
    throw 'localspec: another edit is being written; :Localspec stop ends it'
  endif
  let old = getline(a:range[0], a:range[1])
  let edit = {'buffer': bufnr(), 'first': a:range[0], 'old': old, 'text': '', 'cut': 0, 'filetype': &filetype}
  let fenced = localspec#fenced(old)
  let fields = {'stream': v:true, 'temperature': 0, 'prediction': {'type': 'content', 'content': fenced},
        \ 'messages': [{'role': 'user', 'content': s:question(fenced, len(old), a:instruction)}],
        \ 'localspec': {'kind': 'edit'}}
  let request = localspec#http#ask('/v1/chat/completions', extend(fields, localspec#model()),
        \ function('s:came', [edit]), function('s:ended', [edit]))
  let s:request = request.live ? request : {}
  call localspec#note('edits')
endfunction

" Worded for small models, too, which else write only what they change: the number of lines comes before the
" change, and the change last.
function! s:question(fenced, number, instruction) abort
  let name = empty(expand('%')) ? '' : ' ' .. expand('%:t')
  let [text, this] = a:number == line('$') ? ['the file' .. name, 'file'] : ['a part of the file' .. name, 'part']
  let lines = a:number == 1 ? 'the one line' : printf('all %d lines', a:number)
  let wanted = a:instruction =~# '[.!?]$' ? a:instruction : a:instruction .. '.'
  return printf(s:form, text, a:fenced, lines, this, wanted)
endfunction

function! localspec#edit#stop() abort
  if !empty(s:request)
    call localspec#http#cancel(s:request)
    let s:request = {}
    call localspec#note('')
  endif
endfunction

function! s:came(edit, event) abort
  call localspec#named(a:event)
  let a:edit.text ..= localspec#chat#text(a:event)
  let a:edit.cut = a:edit.cut || localspec#chat#cut(a:event)
  call localspec#note(printf('edits, %d lines', count(a:edit.text, "\n")))
endfunction

function! s:ended(edit, error) abort
  let s:request = {}
  call localspec#note('')
  if !empty(a:error)
    call localspec#failed(a:error)
    return localspec#say(a:error)
  elseif a:edit.cut
    return localspec#say('the answer did not fit: select fewer lines.')
  endif
  let new = localspec#edit#code(a:edit.text)
  if new ==# a:edit.old || empty(new)
    return localspec#say('the answer changes nothing.')
  endif
  call s:when_idle(a:edit, new)
endfunction

" The lines in an answer's code block; without a block, all of it.
function! localspec#edit#code(text) abort
  let lines = split(trim(a:text, "\r\n"), "\r\\=\n", 1)
  let opens = match(lines, '^\s*```')
  if opens < 0
    return lines
  endif
  let fence = matchstr(lines[opens], '`\+')
  let closes = match(lines, '^\s*' .. fence .. '`*\s*$', opens + 1)
  return lines[opens + 1 : closes < 0 ? -1 : closes - 1]
endfunction

" The diff opens once nobody types: a window that opens under one's keys takes them.
function! s:when_idle(edit, new) abort
  if mode(1) !=# 'n' || getcmdwintype() !=# ''
    call timer_start(200, {_ -> s:when_idle(a:edit, a:new)})
    return
  endif
  call s:show(a:edit, a:new)
endfunction

function! s:show(edit, new) abort
  tabnew
  let t:localspec_edit = a:edit
  call s:window('as it is', a:edit.old, a:edit.filetype)
  setlocal nomodifiable
  rightbelow vertical new
  call s:window('proposed: <CR> takes it, q drops it', a:new, a:edit.filetype)
  let t:localspec_new = bufnr()
endfunction

function! s:window(title, lines, filetype) abort
  setlocal buftype=nofile bufhidden=wipe noswapfile nobuflisted undolevels=-1
  call setline(1, a:lines)
  setlocal undolevels=-123456
  let &l:filetype = a:filetype
  let &l:statusline = ' ' .. a:title
  nnoremap <buffer> <silent> <CR> <Cmd>call localspec#edit#take()<CR>
  nnoremap <buffer> <silent> q <Cmd>tabclose<CR>
  diffthis
endfunction

" Put the proposal, with what was changed in it by hand, in the place of the old lines.
function! localspec#edit#take() abort
  let [edit, new] = [t:localspec_edit, getbufline(t:localspec_new, 1, '$')]
  let first = s:found(edit)
  if !first
    return localspec#say('nothing was taken: those lines have changed.')
  endif
  tabclose
  let number = len(edit.old)
  let both = min([number, len(new)])
  call setbufline(edit.buffer, first, new[: both - 1])
  if len(new) > both
    call appendbufline(edit.buffer, first + both - 1, new[both :])
  elseif number > both
    call deletebufline(edit.buffer, first + both, first + number - 1)
  endif
endfunction

" Where the old lines are now: where they were, or the one other place where they stand; 0: nowhere.
function! s:found(edit) abort
  let number = len(a:edit.old)
  let lines = getbufline(a:edit.buffer, 1, '$')
  if lines[a:edit.first - 1 : a:edit.first + number - 2] ==# a:edit.old
    return a:edit.first
  endif
  let places = filter(range(len(lines)), {_, at -> lines[at] ==# a:edit.old[0] && lines[at : at + number - 1] ==# a:edit.old})
  return len(places) == 1 ? places[0] + 1 : 0
endfunction
